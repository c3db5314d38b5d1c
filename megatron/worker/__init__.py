"""Where does a process stand? Its place among the ranks, its host's network and devices, its job. No torch here."""
