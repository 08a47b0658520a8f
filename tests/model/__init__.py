"""The renting protocol as a small program over virtual time, and a search for schedules that break it."""
