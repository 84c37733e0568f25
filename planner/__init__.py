"""Plans: how they are searched for, written, priced and explained."""
