"""The clients by name."""

from collections.abc import Mapping

from mtbench.load import aiperf, guidellm
from mtbench.load.clients import Client
from mtbench.load.format import ClientName

CLIENTS: Mapping[ClientName, Client] = {client.name: client for client in (aiperf.CLIENT, guidellm.CLIENT)}
