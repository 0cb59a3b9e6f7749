"""How many devices, how fast and at what price: a simulator on the policies of the live system."""
