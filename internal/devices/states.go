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

// MCPState is how far fleetd got with a device's MCP server. Unknown tools and
// no tools are different things.
type MCPState string

// MCP states.
const (
	MCPUnknown      MCPState = "unknown"      // not asked yet
	MCPListing      MCPState = "listing"      // initialize or tools/list in progress
	MCPReady        MCPState = "ready"        // tools verified on this connection
	MCPNone         MCPState = "none"         // the device does not speak MCP
	MCPUnresponsive MCPState = "unresponsive" // it does not answer
	MCPError        MCPState = "error"        // it answers with errors
)

// CatalogState is how sure a device's tools are.
type CatalogState string

// Catalog states.
const (
	CatalogReady   CatalogState = "ready"   // verified on this connection
	CatalogStale   CatalogState = "stale"   // known from before; callable
	CatalogUnknown CatalogState = "unknown" // never listed
	CatalogNone    CatalogState = "none"    // the device does not speak MCP
	CatalogError   CatalogState = "error"   // listing failed and nothing is known from before
)

// CloseReason says why a session ended. The list is closed: every value has a
// counter.
type CloseReason string

// Close reasons.
const (
	CloseGone       CloseReason = "gone"       // the device closed or its connection broke: the normal end
	CloseDead       CloseReason = "dead"       // silent too long: two pings unanswered, or one and a half MQTT keepalives
	CloseIdle       CloseReason = "idle"       // 110 s without a data frame and --websocket-idle close
	CloseSuperseded CloseReason = "superseded" // the device connected again
	CloseSlow       CloseReason = "slow"       // it reads too slowly: 64 KiB waited
	CloseNoHello    CloseReason = "no_hello"   // no valid hello within 5 s
	CloseProtocol   CloseReason = "protocol"   // it broke the transport's rules
	CloseTooLarge   CloseReason = "too_large"  // a message over the limit
	CloseContested  CloseReason = "contested"  // a cloned id: the incumbent stays
	CloseRevoked    CloseReason = "revoked"    // revoked or forgotten by the operator
	CloseDraining   CloseReason = "draining"   // the node stops
	CloseCrowded    CloseReason = "crowded"    // too many came at once; it had no turn in time
	CloseFlooding   CloseReason = "flooding"   // it sent more than it may for --flood-grace
	CloseInternal   CloseReason = "internal"   // a fault of ours
)

// CloseReasons lists every reason, for counters.
var CloseReasons = []CloseReason{CloseGone, CloseDead, CloseIdle, CloseSuperseded, CloseSlow, CloseNoHello,
	CloseProtocol, CloseTooLarge, CloseContested, CloseRevoked, CloseDraining, CloseCrowded, CloseFlooding, CloseInternal}
