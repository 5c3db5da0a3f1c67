"""Pure text work for the screens: nothing here imports textual."""
