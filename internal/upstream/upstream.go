// Package upstream connects conversations to a chat server that implements the devices' own
// protocol over WebSocket, as xiaozhi-mqtt-gateway did: one connection per conversation,
// for every transport of the device.
//
//	fleetd  GET <url>?from=mqtt_gateway with device-id, client-id, protocol-version: 2,
//	        x-forwarded-for, authorization: Bearer <token>
//	fleetd  {"type":"hello","version":2,"transport":"websocket","audio_params":{...},"features":{...}}
//	server  {"type":"hello","session_id":"...",...}
//	both    audio as binary messages with a header of 16 bytes, everything else as JSON text
//
// The device's hello is answered earlier, from local state. Messages of the device wait in a
// bounded queue until the chat server is ready. MCP messages are not passed on: fleetd
// remains the device's only MCP client, and answers the chat server itself.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/counters"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/tasks"
)

// Limits of the bridge.
const (
	DialTimeout  = 10 * time.Second
	HelloTimeout = 10 * time.Second // for the chat server's hello
	WriteTimeout = 10 * time.Second
	PingEvery    = 30 * time.Second
	DeadAfter    = 75 * time.Second // without a byte of the chat server: two pings without a response
	CatalogWait  = 10 * time.Second // of tools/list for a device whose tools are not known yet

	// RedialFirst is the shortest pause between two connections of one conversation. It
	// doubles with each failure, up to RedialLast.
	RedialFirst = time.Second
	RedialLast  = 30 * time.Second

	MaxQueuedFrames   = 500 // for one chat server: 30 s, more than dialling and the hello may take
	MaxQueuedMessages = 64  // including responses to the chat server
	MaxQueuedBytes    = 1 << 20
	// KeptFrames is how many of the newest frames are kept while a conversation has no chat
	// server: the audio of a wake word arrives before the message that announces it
	// (application.cc:890-897). The device's own queue has the same size.
	KeptFrames = 40
	// maxEarly limits the conversations with messages before Begin.
	maxEarly = 64

	MaxText     = 256 << 10                 // bytes of a text message; a longer one is dropped
	MaxBinary   = headerLength + MaxFrame   // bytes of a binary message; a longer one is dropped
	MaxFrame    = envelope.MaxDeviceMessage // bytes of one Opus packet
	MaxMessage  = 16 << 20                  // bytes of any message; a longer one ends the connection
	MaxRequests = 16                        // MCP requests of one chat server in progress
	MaxIDLength = 256                       // bytes of a session or request id
	PageBytes   = 8000                      // of a page of tools, as the firmware's (mcp_server.cc:452-506)
	closeLinger = time.Second               // for the Close frame
	speechTail  = 300 * time.Millisecond    // between the end of playing and hanging up; `tts stop` is sent meanwhile
)

// The query parameter by which xiaozhi-server detects that binary messages have a header:
// its path must end in it.
const (
	markName, markValue = "from", "mqtt_gateway"
)

// Service contains the methods of fleet.Service that the bridge needs.
type Service interface {
	Get(ctx context.Context, id devices.ID) (devices.View, error)
	Tools(ctx context.Context, id devices.ID, user bool) (devices.ToolList, error)
	CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
	CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
}

// Options of a Bridge.
type Options struct {
	// URL of the chat server, ws:// or wss://; `from=mqtt_gateway` is added to its query
	// if it is missing.
	URL string
	// Token returns the bearer token of one connection, for example
	// credential.UpstreamToken with a secret.
	Token   func(clientID, device string, now time.Time) string
	Version string // of fleetd, for the User-Agent
	Log     *slog.Logger
}

// Outcome is an event of a connection to the chat server.
type Outcome string

// Outcomes. Every dial ends in dial_failed, or in dialled and one of the rest.
const (
	Dialled      Outcome = "dialled"
	DialFailed   Outcome = "dial_failed"
	HelloMissing Outcome = "hello_timeout"
	Closed       Outcome = "closed" // by the chat server, or by an error
	Ended        Outcome = "ended"  // with the conversation
)

// MessageError is the kind of error in a message of the chat server.
type MessageError string

// Kinds of unusable messages.
const (
	BadJSON     MessageError = "json"      // not JSON, not UTF-8, or nested too deep
	BadEnvelope MessageError = "envelope"  // not an object, or no string member `type`
	BadMCP      MessageError = "mcp"       // payload is not a JSON-RPC request
	BadFrame    MessageError = "frame"     // header and length do not match
	BadAudio    MessageError = "audio"     // not an Opus packet that the device can decode
	BadTooLarge MessageError = "too_large" // over MaxText or MaxBinary
	BadRefused  MessageError = "refused"   // not a message for devices
	BadHello    MessageError = "hello"     // invalid session id
)

// Direction of a frame.
type Direction string

// Directions.
const (
	Up   Direction = "up"   // to the chat server
	Down Direction = "down" // to the device
)

// DropReason is the reason why a frame or message was dropped.
type DropReason string

// Reasons of drops.
const (
	DropFull       DropReason = "full"        // the queue for the chat server is full
	DropNoUpstream DropReason = "no_upstream" // the conversation currently has no chat server
	DropDevice     DropReason = "device"      // the device is not connected, or its queue is full
	DropLate       DropReason = "late"        // a response for a connection that has ended
)

// Bridge is the speech.Voice of a chat server. It is safe for concurrent use.
type Bridge struct {
	opt      Options
	url      string
	dialer   websocket.Dialer
	dialNet  func(ctx context.Context, network, addr string) (net.Conn, error)
	svc      atomic.Pointer[Service]
	tasks    *tasks.Group
	sessions sync.Map // *speech.Conversation to *bridgeSession, from Begin to End

	mu sync.Mutex // acquired before any session's lock
	// early contains conversations with messages before Begin, oldest first: a frame over
	// UDP, or the end, may arrive before Begin.
	early []*bridgeSession

	Connections counters.Map[Outcome]
	BadMessages counters.Map[MessageError]
	Frames      counters.Map[Direction]
	Dropped     counters.Map[DropReason]
	Requests    counters.Map[string] // MCP requests, by outcome: ok or an error code
}

// New returns a bridge to the chat server at opt.URL. It dials when the first conversation
// begins. Errors describe what is wrong with the URL.
func New(opt Options) (*Bridge, error) {
	u, err := url.Parse(opt.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--voice-upstream: %w", err)
	case u.Scheme != "ws" && u.Scheme != "wss" || u.Host == "":
		return nil, fmt.Errorf("--voice-upstream: %q must be ws://HOST/PATH or wss://HOST/PATH", opt.URL)
	case u.User != nil:
		return nil, errors.New("--voice-upstream: the URL must not contain a user name or password; the token is sent in a header")
	case u.Fragment != "":
		return nil, fmt.Errorf("--voice-upstream: %q must not have a #fragment", opt.URL)
	}
	switch mark := u.Query().Get(markName); mark {
	case markValue:
	case "":
		u.RawQuery = strings.TrimPrefix(u.RawQuery+"&"+markName+"="+markValue, "&")
	default:
		return nil, fmt.Errorf("--voice-upstream: from=%s is not supported: the chat server needs from=mqtt_gateway; leave `from` out", mark)
	}
	b := &Bridge{opt: opt, url: u.String(), tasks: tasks.New(opt.Log), dialNet: (&net.Dialer{Timeout: DialTimeout}).DialContext}
	b.dialer = websocket.Dialer{HandshakeTimeout: DialTimeout, Proxy: http.ProxyFromEnvironment, ReadBufferSize: 1024, WriteBufferSize: 1024,
		WriteBufferPool: &sync.Pool{}}
	return b, nil
}

// Attach sets the service of the bridge. Call it before the first conversation.
func (b *Bridge) Attach(svc Service) { b.svc.Store(&svc) }

// Close ends all conversations and waits for the bridge's goroutines. Later conversations
// are ignored.
func (b *Bridge) Close() {
	b.tasks.Close()
	b.tasks.Wait()
}

// Begin implements speech.Voice: it starts to dial.
func (b *Bridge) Begin(c *speech.Conversation) {
	b.mu.Lock()
	t := b.earlyLocked(c)
	if t != nil {
		b.early = slices.DeleteFunc(b.early, func(s *bridgeSession) bool { return s == t })
	} else {
		t = newBridgeSession(b, c)
	}
	_, twice := b.sessions.LoadOrStore(c, t)
	b.mu.Unlock()
	if !twice && !t.begin() {
		b.sessions.Delete(c) // End was called first
	}
}

// Message implements speech.Voice.
func (b *Bridge) Message(c *speech.Conversation, kind string, msg []byte) {
	b.session(c).message(kind, msg)
}

// Audio implements speech.Voice.
func (b *Bridge) Audio(c *speech.Conversation, f envelope.Frame) { b.session(c).audio(f) }

// End implements speech.Voice: it ends the connection to the chat server.
func (b *Bridge) End(c *speech.Conversation) {
	b.session(c).end()
	b.sessions.Delete(c)
}

// session returns the session of a conversation, and creates an early one if there is none.
func (b *Bridge) session(c *speech.Conversation) *bridgeSession {
	if t, ok := b.sessions.Load(c); ok {
		return t.(*bridgeSession)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t, ok := b.sessions.Load(c); ok {
		return t.(*bridgeSession)
	}
	t := b.earlyLocked(c)
	if t == nil {
		t = newBridgeSession(b, c)
		if len(b.early) >= maxEarly {
			b.early = slices.Delete(b.early, 0, 1)
		}
		b.early = append(b.early, t)
	}
	return t
}

func (b *Bridge) earlyLocked(c *speech.Conversation) *bridgeSession {
	for _, t := range b.early {
		if t.c == c {
			return t
		}
	}
	return nil
}
