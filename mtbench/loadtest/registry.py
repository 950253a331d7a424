"""The clients by name."""

from collections.abc import Mapping

from mtbench.loadtest import aiperf, guidellm
from mtbench.loadtest.clients import Client
from mtbench.loadtest.format import ClientName

CLIENTS: Mapping[ClientName, Client] = {client.name: client for client in (aiperf.CLIENT, guidellm.CLIENT)}
