// Package devices is the vocabulary of fleetd: ids, records, states, errors,
// events and the messages between nodes, with the pure rules on them, such as
// which of two states of a device is newer and which generations of credentials
// are valid.
//
// It has no locks, no goroutines and no interfaces; the core that works with
// these types is package fleet.
package devices
