package session

import (
	"sync/atomic"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/mcpclient"
)

// State is a session's transport and the state of its tools.
type State struct {
	Transport devices.Transport
	MCP       devices.MCPState
}

// DeviationKey is a deviation and the firmware version that has it.
type DeviationKey struct {
	Kind     mcpclient.Deviation
	Firmware string
}

// MaxDeviationKeys limits the label values that devices can cause; further firmware
// versions count as "other".
const MaxDeviationKeys = 256

// Stats counts events of sessions. It is safe for concurrent use.
type Stats struct {
	BadMessages     atomic.Uint64 // envelopes that could not be parsed
	Notified        atomic.Uint64 // notifications and messages published
	NotifyDrops     atomic.Uint64 // over the per-device rate
	CatalogHits     atomic.Uint64 // lists with a known hash
	CatalogNew      atomic.Uint64 // lists parsed and stored
	CatalogsRefused atomic.Uint64 // lists that did not fit into memory
	CatalogsEvicted atomic.Uint64 // lists dropped from memory to make room
	Unrecorded      atomic.Uint64 // changes of lists beyond the limit of their device
	Handshakes      atomic.Int64  // in progress
	Waiting         atomic.Int64  // calls waiting for a device's slot
	InFlight        atomic.Int64  // calls on a device

	Closed     counters.Map[devices.CloseReason]
	Connects   counters.Map[devices.Transport]
	States     counters.Map[State] // sessions in this state (a gauge)
	Deviations counters.Map[DeviationKey]
	Contested  counters.Map[devices.Dispute] // refusals because an id is contested

	HelloTime     counters.Histogram
	HandshakeTime counters.Histogram
}
