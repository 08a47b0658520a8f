"""What each cloud says exists: the only room that lists clouds. Knows no Kubernetes."""
