"""How tokens reach their experts and come back."""
