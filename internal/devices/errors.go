package devices

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/jsonspan"
)

// Code is the stable name of a refusal or failure, as REST and NATS show it.
type Code string

// Codes. Each adapter maps them to its own statuses in one table.
const (
	CodeBadRequest       Code = "bad_request"
	CodeTooLarge         Code = "too_large"
	CodeNotFound         Code = "not_found"
	CodeInvalidArguments Code = "invalid_arguments"
	CodeUnauthorized     Code = "unauthorized"
	CodeForbidden        Code = "forbidden"
	CodeChanged          Code = "precondition_failed"
	CodeToolDenied       Code = "tool_denied"
	CodeConfirmation     Code = "confirmation_required"
	CodeDeviceUnknown    Code = "device_unknown"
	CodeToolUnknown      Code = "tool_unknown"
	CodeDeviceOffline    Code = "device_offline"
	CodeSuperseded       Code = "superseded"
	CodeConnectionLost   Code = "connection_lost"
	CodeDeviceBusy       Code = "device_busy"
	CodeDeviceError      Code = "device_error"
	CodeDeviceTimeout    Code = "device_timeout"
	CodeUnavailable      Code = "unavailable"
	CodeInternal         Code = "internal"
)

// OutcomeUnknown is the outcome of a call whose bytes left while its answer
// never came: the device may or may not have acted.
const OutcomeUnknown = "unknown"

// Fault is one thing wrong with a call's arguments.
type Fault struct {
	Pointer string `json:"pointer"` // RFC 6901, into the arguments
	Detail  string `json:"detail"`
}

// Error is a refusal or failure with its stable code. Sent and Outcome are set
// where a call got as far as the connection.
type Error struct {
	Code    Code
	Detail  string // one sentence for people, naming what to do where there is something
	Part    string // with CodeUnavailable: the part that is down
	Sent    bool   // whether bytes left for the device
	Outcome string // OutcomeUnknown if they did and no answer came
	Rule    string // which rule refused, where one did
	// Confirmation, with CodeConfirmation, is what confirms the same call once.
	Confirmation string
	Faults       []Fault
	Call         string // the id of the call that failed; empty if none was made of the request
}

// Error is the code and the detail.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Detail }

// Is reports equality by code, so that errors.Is works across a hop.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Errorf returns an Error with this code and a formatted detail.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Detail: fmt.Sprintf(format, args...)}
}

// AsError returns err as *Error; anything else becomes CodeInternal, a
// database failure CodeUnavailable.
func AsError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, ErrDatabase):
		return &Error{Code: CodeUnavailable, Part: "database", Detail: "the database does not answer; try again later"}
	case errors.Is(err, ErrNotFound):
		return &Error{Code: CodeNotFound, Detail: "no such thing"}
	default:
		return &Error{Code: CodeInternal, Detail: err.Error()}
	}
}

// ErrOverloaded is returned by fleet.Conn.SendControl when too much waits already.
var ErrOverloaded = errors.New("too many bytes wait for this connection")

// ErrHello is returned by fleet.Session.HandleControl for a hello: the front end
// answers it where its transport allows more than one.
var ErrHello = errors.New("hello on a session that is open")

// ErrNoHolder is returned by a fleet.Router when no node holds the device.
var ErrNoHolder = errors.New("no node holds the device")

// ErrConflict means that somebody else changed a thing first.
var ErrConflict = errors.New("it was changed meanwhile")

// ErrBound is returned by the keeper of attestation keys where a serial number
// would prove a second device, or a device be proven by a second one.
var ErrBound = errors.New("bound otherwise")

// Origin says where a request came to this node from.
type Origin uint8

// Origins.
const (
	// OriginCaller: into the fleet. It is routed to the node that holds the device,
	// and recorded.
	OriginCaller Origin = iota
	// OriginHolder: into the fleet, by the device's own subject. It is recorded, and
	// never routed.
	OriginHolder
	// OriginNode: from another node, which keeps the record. It is never routed.
	OriginNode
)

// ToolCall asks for one tool of one device. The context given with it carries
// the deadline, waiting included.
type ToolCall struct {
	ID        string // see CallIDs; empty: the core makes one
	Device    ID
	Tool      string
	Arguments json.RawMessage // a JSON object, or nil for none
	By        access.By       // who asks; never sent to the device
	Origin    Origin          `json:"-"`
	// Confirmation is the token of an earlier refusal with CodeConfirmation.
	Confirmation string

	// Late takes the answer if it comes after the caller's time is over, or that none
	// will come; nil: nobody wants it. It is called at most once, and must not block.
	Late func(ToolResult, error) `json:"-"`

	// Judged are the rules that let the call pass. The core sets it; it does not
	// travel between nodes.
	Judged *access.Guard `json:"-"`
}

// ToolResult is what a tool answered.
type ToolResult struct {
	Content  json.RawMessage // a JSON array of MCP content items
	IsError  bool
	Outcome  string // `restarting` for tools that restart the device, else empty
	Duration time.Duration
	Node     string
	Call     string // its id, where it came into the fleet
}

// RPCCall asks for one MCP request other than initialize.
type RPCCall struct {
	ID     string // ToolCall's
	Device ID
	Method string
	Params json.RawMessage // a JSON object, or nil for none
	By     access.By
	Origin Origin
	// Confirmation is ToolCall's, for tools/call.
	Confirmation string
}

// RPCResult is the device's answer: exactly one of Result and Error is set.
type RPCResult struct {
	Result json.RawMessage
	Error  json.RawMessage // the device's error object, with a code synthesised where it sent none
	Call   string          // its id
}

// Message is a JSON message for a device, other than MCP and hello.
type Message struct {
	ID     string // ToolCall's
	Device ID
	Body   json.RawMessage // an object with a string member `type`
	By     access.By
	Origin Origin
}

// ToolList is the answer to the question for a device's tools.
type ToolList struct {
	Catalog Hash
	State   CatalogState
	Partial bool
	Tools   []json.RawMessage // each exactly as the device sent it
}

// CheckText refuses a value with a string that the device's reader does not take
// as it is: with a lone surrogate it drops the whole message without an answer, and
// a NUL ends the string. What names the value.
func CheckText(what string, value []byte) error {
	pointer, fault := jsonspan.FindTextFault(value)
	detail := ""
	switch fault {
	case jsonspan.TextOK:
		return nil
	case jsonspan.LoneSurrogate:
		detail = "has half of a surrogate pair: the device drops such a message; send both halves, or the character itself"
	case jsonspan.NUL:
		detail = `has the character \u0000: the device ends the text there; leave it out`
	}
	return &Error{Code: CodeInvalidArguments, Detail: "the " + what + " cannot be read by the device", Faults: []Fault{{Pointer: pointer, Detail: detail}}}
}
