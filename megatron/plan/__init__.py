"""What will it cost? Memory, time and bytes of a run on devices that need not be here, and the best layout for it."""
