package devices

// State is a device's state as lists show it.
type State string

// States.
const (
	StateOnline    State = "online"
	StateOffline   State = "offline"
	StatePending   State = "pending"
	StateContested State = "contested"
)

// MCPState is the state of a device's MCP server. An unknown list of tools is not an
// empty one.
type MCPState string

// MCP states.
const (
	MCPUnknown      MCPState = "unknown"      // no request sent yet
	MCPListing      MCPState = "listing"      // initialize or tools/list in progress
	MCPReady        MCPState = "ready"        // tools verified on this connection
	MCPNone         MCPState = "none"         // the device does not speak MCP
	MCPUnresponsive MCPState = "unresponsive" // it does not answer
	MCPError        MCPState = "error"        // it answers with errors
)

// CatalogState is the state of a device's tool list.
type CatalogState string

// Catalog states.
const (
	CatalogReady   CatalogState = "ready"   // verified on this connection
	CatalogStale   CatalogState = "stale"   // last known list; callable
	CatalogUnknown CatalogState = "unknown" // never listed
	CatalogNone    CatalogState = "none"    // the device does not speak MCP
	CatalogError   CatalogState = "error"   // listing failed and no list is known
)

// CloseReason is why a session ended. The list is complete: every value has a counter.
type CloseReason string

// Close reasons.
const (
	CloseGone       CloseReason = "gone"       // the device closed it or the connection broke: the normal end
	CloseDead       CloseReason = "dead"       // no sign of life: two pings unanswered, or one and a half MQTT keepalives
	CloseIdle       CloseReason = "idle"       // 110 s without a data frame and --websocket-idle close
	CloseSuperseded CloseReason = "superseded" // the device connected again
	CloseSlow       CloseReason = "slow"       // it reads too slowly: 64 KiB were queued
	CloseNoHello    CloseReason = "no_hello"   // no valid hello within 5 s
	CloseProtocol   CloseReason = "protocol"   // it violated the transport's protocol
	CloseTooLarge   CloseReason = "too_large"  // a message over the limit
	CloseContested  CloseReason = "contested"  // a cloned id: the existing session is kept
	CloseRevoked    CloseReason = "revoked"    // revoked or forgotten by the operator
	CloseDraining   CloseReason = "draining"   // the node is stopping
	CloseCrowded    CloseReason = "crowded"    // too many devices connected at once; it was not admitted in time
	CloseFlooding   CloseReason = "flooding"   // it sent more than it may for --flood-grace
	CloseInternal   CloseReason = "internal"   // an internal error (bug)
)

// OfflineNodeLost is the offline reason of a device whose node died; no session ends with it.
const OfflineNodeLost = "node_lost"

// CloseReasons lists every reason, for counters.
var CloseReasons = []CloseReason{CloseGone, CloseDead, CloseIdle, CloseSuperseded, CloseSlow, CloseNoHello,
	CloseProtocol, CloseTooLarge, CloseContested, CloseRevoked, CloseDraining, CloseCrowded, CloseFlooding, CloseInternal}
