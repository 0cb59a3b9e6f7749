"""The processes of a cluster: configuration, the node agent, its engines and its HTTP API."""
