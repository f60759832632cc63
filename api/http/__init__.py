"""What is HTTP's own in the API: who may call, how a body is read, and how long a request may take to arrive."""
