"""Whatever goes wrong on one rank, wherever: all end soon, and the user reads why. See :mod:`.cases`."""
