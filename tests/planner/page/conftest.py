"""The engine of charts keeps a pair of sockets to itself for as long as its process lives: it is
started before anything is counted that a run might leave behind."""

import vl_convert

vl_convert.javascript_bundle("", "6.4")
