"""Hardware as the catalog and a cluster's file describe it: devices, links, hosts, their curves."""
