"""What can be rented where, and for how much: facts about clouds that are true without asking one."""
