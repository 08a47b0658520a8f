"""The end-to-end test: images without a registry, a real node, and a release as a user has it."""
