"""Cloud adapters: the only place that knows a cloud. ``providers.base`` is the contract."""
