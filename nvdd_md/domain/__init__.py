"""Who owns which atom, who needs a copy of it, and how rows move between ranks."""
