"""The webhooks: what an opted-in Pod gets before it is stored, and why it may be refused."""
