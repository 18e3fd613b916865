"""zstore under the interfaces of other libraries. Short modules of `zstore` re-export their names."""
