// Package devices contains the types that the core and its adapters share: ids,
// records, states, errors, events and the messages between nodes, with the rules on
// them, such as which of two states of a device is newer and which generations of
// credentials are valid.
//
// It has no locks, no goroutines and no interfaces; package fleet and the packages
// below this one work with these types.
package devices
