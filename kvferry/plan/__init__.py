"""`kvferry plan`: the memory plan of a device, from its flags to text, JSON or a picture."""
