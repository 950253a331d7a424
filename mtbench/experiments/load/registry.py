"""The clients by name."""

from mtbench.experiments.load import aiperf, guidellm
from mtbench.experiments.load.clients import Client
from mtbench.experiments.load.format import ClientName

CLIENTS: dict[ClientName, Client] = {client.name: client for client in (aiperf.CLIENT, guidellm.CLIENT)}
