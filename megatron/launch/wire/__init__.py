"""Messages between launcher and agents, their encryption and connections."""
