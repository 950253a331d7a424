"""The clients by name."""

from mtbench.loadtest import aiperf, guidellm
from mtbench.loadtest.clients import Client
from mtbench.loadtest.format import ClientName

CLIENTS: dict[ClientName, Client] = {client.name: client for client in (aiperf.CLIENT, guidellm.CLIENT)}
