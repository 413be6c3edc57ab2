package devices

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// StepKind is a kind of Step.
type StepKind string

// Kinds of steps.
const (
	StepCheck     StepKind = "ota.check"       // an OTA check was answered; Cause: what the device was offered, or why it was refused
	StepActivate  StepKind = "activation.try"  // the device requested its activation
	StepRefused   StepKind = "connect.refused" // a connection did not become a session
	StepConnected StepKind = "connected"       // the device is connected and its tools are listed, or it has none
	StepMCPFailed StepKind = "mcp.failed"      // `initialize` or `tools/list` failed; the connection stays
	StepCatalog   StepKind = "catalog"         // its tools differ from before
	StepDeviation StepKind = "deviation"       // it deviated from the protocol; Text: how
	StepSilent    StepKind = "udp"             // a conversation is open and no audio arrives
	StepLimit     StepKind = "limit"           // it exceeded a limit; Text: which
	StepClosed    StepKind = "closed"          // the session ended; Cause: the CloseReason
)

// StepKinds lists all kinds.
var StepKinds = []StepKind{StepCheck, StepActivate, StepRefused, StepConnected, StepMCPFailed, StepCatalog, StepDeviation, StepSilent, StepLimit, StepClosed}

// StepCause is what happened in a step, a word, besides the CloseReasons.
type StepCause string

// Causes of steps.
const (
	CauseOffersWebSocket StepCause = "offers_websocket"
	CauseOffersMQTT      StepCause = "offers_mqtt"
	CausePending         StepCause = "pending"        // it got an activation code
	CauseRefusedClient   StepCause = "refused_client" // an operator refused the client
	CauseBadRequest      StepCause = "bad_request"
	CauseRateLimited     StepCause = "rate_limited"
	CauseTooManyNew      StepCause = "too_many_new"
	CauseUnavailable     StepCause = "unavailable"
	CauseUnsafe          StepCause = "unsafe" // the reply failed its safety check
	CauseWrongToken      StepCause = "wrong_token"
	CauseOldToken        StepCause = "old_token" // of a generation that is no longer valid
	CauseUnknownDevice   StepCause = "unknown_device"
	CauseUnresponsive    StepCause = "unresponsive"
	CauseError           StepCause = "error"
	CauseNoMCP           StepCause = "no_mcp"
	CauseActivated       StepCause = "activated"
	CauseNotYet          StepCause = "not_yet"
)

// StepCauses lists all causes, the CloseReasons first.
var StepCauses = append(closeCauses(), CauseOffersWebSocket, CauseOffersMQTT, CausePending, CauseRefusedClient, CauseBadRequest, CauseRateLimited, CauseTooManyNew,
	CauseUnavailable, CauseUnsafe, CauseWrongToken, CauseOldToken, CauseUnknownDevice, CauseUnresponsive, CauseError, CauseNoMCP, CauseActivated, CauseNotYet)

func closeCauses() (causes []StepCause) {
	for _, r := range CloseReasons {
		causes = append(causes, StepCause(r))
	}
	return slices.Clip(causes)
}

// TextListing is the Text of a StepClosed while the tools of the device were being listed.
const TextListing = "while its tools were listed"

// MaxStepText is how many bytes the recorder keeps of a step's Text.
const MaxStepText = 64

// Step is something that happened to a device of this node, or to a client that presented
// its id. Members that a kind does not have are zero.
type Step struct {
	Kind       StepKind
	Device     ID
	Cause      StepCause
	Text       string // a detail: an endpoint, a firmware version, an error
	Remote     netip.Addr
	Transport  Transport
	Epoch      Epoch         // of the session
	Generation int64         // of the credentials
	Took       time.Duration // connected: since the session began; closed: age of the session
	Calls      int           // closed: calls in progress
	Image      string        // ota.check: the first ImageDigits digits of the SHA-256 of the image that runs
	// Proven means that the client had valid credentials of the device, or its admitted Client-Id. Anybody who
	// knows the id of a device can cause other steps; these have limits of their own.
	Proven bool
	// Unknown means that the device is not known to the fleet. These steps share one small
	// ring.
	Unknown bool

	// Set by the recorder.
	At    time.Time
	Count int    // of equal steps that were combined into this one, the last at At
	Node  string // that recorded it
	Seq   uint64 // orders the records of a device with one time on one node
}

// ImageDigits is how many digits of an image's SHA-256 a Step has.
const ImageDigits = 8

// Position returns the place of the step in the log of its device.
func (s *Step) Position() LogPosition { return LogPosition{s.At, s.Node, s.Seq} }

// LogPosition is a place in the log of a device, which has its records by time, node and number, the newest first.
// The zero LogPosition is the beginning; one with a time alone is before all records that are earlier.
type LogPosition struct {
	At   time.Time
	Node string
	Seq  uint64
}

// Compare returns -1 if p comes before q, which is older, 1 if it comes after q, else 0.
func (p LogPosition) Compare(q LogPosition) int {
	return cmp.Or(q.At.Compare(p.At), cmp.Compare(q.Node, p.Node), cmp.Compare(q.Seq, p.Seq))
}

// Precedes reports whether a list that continues at p has the record at q.
func (p LogPosition) Precedes(q LogPosition) bool { return p == LogPosition{} || p.Compare(q) < 0 }

// String returns the position as ParseLogPosition reads it.
func (p LogPosition) String() string {
	return strconv.FormatInt(p.At.UnixNano(), 10) + " " + strconv.FormatUint(p.Seq, 10) + " " + p.Node
}

// ParseLogPosition parses the result of String, or returns ErrCursor. Empty text is the beginning.
func ParseLogPosition(text string) (p LogPosition, err error) {
	if text == "" {
		return p, nil
	}
	at, rest, _ := strings.Cut(text, " ")
	seq, node, _ := strings.Cut(rest, " ")
	nanos, err := strconv.ParseInt(at, 10, 64)
	if err == nil {
		p.Seq, err = strconv.ParseUint(seq, 10, 64)
	}
	if err != nil {
		return LogPosition{}, ErrCursor
	}
	p.At, p.Node = time.Unix(0, nanos), node
	return p, nil
}

// Ends selects the ends of sessions with a cause over a transport in a period.
type Ends struct {
	Cause     StepCause
	Transport Transport
	From, To  time.Time
	Except    ID
}

// Match reports whether a StepClosed is selected; its device is not looked at.
func (q *Ends) Match(s *Step) bool {
	return s.Cause == q.Cause && s.Transport == q.Transport && !s.At.Before(q.From) && !s.At.After(q.To)
}

// CallStep is what a node recorded of a tool call, raw request or message: the node that
// received it first, and the node that holds the device, each record one.
type CallStep struct {
	Call    string // id
	Device  ID
	Key     string // of the caller
	Tool    string // or method, or type of the message
	At      time.Time
	Took    time.Duration
	Waited  time.Duration // for the device's slot
	Ahead   string        // id of the call that held the slot when it began to wait
	Sent    bool          // bytes left for the device
	Holder  bool          // recorded by the node that holds the device
	Late    bool          // the answer arrived after the caller's deadline, Took after the call began
	Outcome string        // ok, tool_error, restarting, or an error's code
	Rule    string        // that refused it
	Detail  string
	Held    string // the node that holds the device, as the first node learned
	Bytes   int    // of the answer

	// Set when it is read.
	Node string // that recorded it
	Seq  uint64 // orders the records of a device with one time on one node
}

// Position returns the place of the call in the log of its device.
func (c *CallStep) Position() LogPosition { return LogPosition{c.At, c.Node, c.Seq} }

// Tracer shows the messages of devices that are traced.
type Tracer interface {
	// Message shows a message that a device sent, or that is about to be sent to it. It
	// never blocks, and does not keep msg.
	Message(device ID, received bool, msg []byte)
}

// Recorder records what happens to devices, in memory. Its methods never block.
type Recorder interface {
	Step(s Step)
	Call(c CallStep)
	// Forget deletes everything that is recorded of a device.
	Forget(id ID)
}
