"""RunPod over REST v2: one container on a rented host, billed by the second."""
