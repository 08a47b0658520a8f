"""The end-to-end test on a real node: images without a registry, a kubelet with containerd, a release as a user has it."""
