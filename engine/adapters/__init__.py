"""zstore under the interfaces of other libraries. Short modules of `zstore` hand their names on."""
