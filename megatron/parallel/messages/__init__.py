"""The account of messages: intercepted, counted, timed."""
