package session

import (
	"sync/atomic"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// State is a session's transport and how far its tools are read.
type State struct {
	Transport devices.Transport
	MCP       devices.MCPState
}

// DeviationKey names a deviation and the firmware version that shows it.
type DeviationKey struct {
	Kind     mcpclient.Deviation
	Firmware string
}

// MaxDeviationKeys bounds the label values that devices can cause; further
// firmware versions count as "other".
const MaxDeviationKeys = 256

// Stats counts what sessions do. It is safe for concurrent use.
type Stats struct {
	BadMessages     atomic.Uint64 // envelopes refused
	Notified        atomic.Uint64 // notifications and messages published
	NotifyDrops     atomic.Uint64 // over the per-device rate
	CatalogHits     atomic.Uint64 // lists known by their hash
	CatalogNew      atomic.Uint64 // lists parsed and stored
	CatalogsRefused atomic.Uint64 // lists that found no room in memory
	CatalogsEvicted atomic.Uint64 // lists dropped from memory to make room
	Unrecorded      atomic.Uint64 // changes of lists over their device's share of the database
	Handshakes      atomic.Int64  // in progress
	Waiting         atomic.Int64  // calls waiting for a device's slot
	InFlight        atomic.Int64  // calls on a device

	Closed     counters.Map[devices.CloseReason]
	Connects   counters.Map[devices.Transport]
	States     counters.Map[State] // sessions now in this state (a gauge)
	Deviations counters.Map[DeviationKey]
	Contested  counters.Map[devices.Dispute] // refusals because an id is contested

	HelloTime     counters.Histogram
	HandshakeTime counters.Histogram
}
