"""Virtual nodes: a Node object per provider account, and what a kubelet would do for Pods bound to it."""
