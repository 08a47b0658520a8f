"""The HTTPS endpoint that the API server calls where a node has its kubelet: logs, exec, ports, usage.

Every replica serves it. What Kubernetes promises about options, exit codes and streams is honoured here,
once; adapters offer small things (`providers.capabilities`).
"""
