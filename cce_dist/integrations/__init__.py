"""The loss inside other libraries. Each file imports its library only when used."""
