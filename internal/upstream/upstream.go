// Package upstream carries conversations to a chat server that speaks the
// devices' own protocol over WebSocket, as xiaozhi-mqtt-gateway did: one
// connection per conversation, whatever the device's transport.
//
//	fleetd  GET <url>?from=mqtt_gateway with device-id, client-id, protocol-version: 2,
//	        x-forwarded-for, authorization: Bearer <token>
//	fleetd  {"type":"hello","version":2,"transport":"websocket","audio_params":{...},"features":{...}}
//	server  {"type":"hello","session_id":"...",...}
//	both    audio as binary messages behind 16 bytes of header, everything else as JSON text
//
// The device's hello was answered long before, from local state. What the
// device says until the chat server is ready waits in a bounded queue. MCP does
// not pass: fleetd stays the device's only MCP client and answers the chat
// server from what it knows.
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
	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
)

// Limits of the bridge.
const (
	DialTimeout  = 10 * time.Second
	HelloTimeout = 10 * time.Second // for the chat server's hello
	WriteTimeout = 10 * time.Second
	PingEvery    = 30 * time.Second
	DeadAfter    = 75 * time.Second // without a byte of the chat server: two pings unanswered
	CatalogWait  = 10 * time.Second // of a tools/list for a device whose tools are not known yet

	// RedialFirst is the shortest pause between two connections of one
	// conversation; it doubles with each that fails, up to RedialLast.
	RedialFirst = time.Second
	RedialLast  = 30 * time.Second

	MaxQueuedFrames   = 500 // for one chat server: 30 s, more than dialling and hello may take
	MaxQueuedMessages = 64  // answers to the chat server included
	MaxQueuedBytes    = 1 << 20
	// KeptFrames are the newest frames of a conversation that has no chat
	// server: the wake word is heard before the message that announces it
	// (application.cc:890-897). It is the device's own queue.
	KeptFrames = 40
	// maxStrays bounds the conversations that were heard of before they began.
	maxStrays = 64

	MaxText     = 256 << 10                 // bytes of a text message; a longer one is passed over
	MaxBinary   = headerLength + MaxFrame   // bytes of a binary message; the same
	MaxFrame    = envelope.MaxDeviceMessage // bytes of one Opus packet
	MaxMessage  = 16 << 20                  // bytes of any message; a longer one ends the connection
	MaxRequests = 16                        // MCP requests of one chat server in progress
	MaxIDLength = 256                       // bytes of a session or request id
	PageBytes   = 8000                      // of a page of tools, as the firmware's (mcp_server.cc:452-506)
	closeLinger = time.Second               // for the Close frame
	speechTail  = 300 * time.Millisecond    // from the end of playing to hanging up: `tts stop` goes out within it
)

// The marker by which xiaozhi-server knows that binary messages have a header:
// its path must end in it.
const (
	markName, markValue = "from", "mqtt_gateway"
)

// Service is what the bridge needs of fleet.Service.
type Service interface {
	Get(ctx context.Context, id devices.ID) (devices.View, error)
	Tools(ctx context.Context, id devices.ID, user bool) (devices.ToolList, error)
	CallTool(ctx context.Context, c devices.ToolCall) (devices.ToolResult, error)
	CallRPC(ctx context.Context, c devices.RPCCall) (devices.RPCResult, error)
}

// Options of a Bridge.
type Options struct {
	// URL of the chat server, ws:// or wss://; `from=mqtt_gateway` is added to
	// its query if it is not there.
	URL string
	// Token makes the bearer token of one connection, such as
	// credential.UpstreamToken with a secret; nil for the gateway's test token.
	Token   func(clientID, device string, now time.Time) string
	Version string // of fleetd, for the User-Agent
	Log     *slog.Logger
}

// Outcome is something that happened to a connection to the chat server.
type Outcome string

// Outcomes. Every dial ends in dial_failed, or in dialled and one of the rest.
const (
	Dialled      Outcome = "dialled"
	DialFailed   Outcome = "dial_failed"
	HelloMissing Outcome = "hello_timeout"
	Closed       Outcome = "closed" // by the chat server, or broken
	Ended        Outcome = "ended"  // with the conversation
)

// Bad says what was wrong with a message of the chat server. The list is closed.
type Bad string

// Kinds of unusable messages.
const (
	BadJSON     Bad = "json"      // not JSON, not UTF-8, or nested too deep
	BadEnvelope Bad = "envelope"  // no object, or no string member `type`
	BadMCP      Bad = "mcp"       // payload is no JSON-RPC request
	BadFrame    Bad = "frame"     // header and length do not fit
	BadAudio    Bad = "audio"     // no Opus packet that the device could decode
	BadTooLarge Bad = "too_large" // over MaxText or MaxBinary
	BadRefused  Bad = "refused"   // not a message for devices
	BadHello    Bad = "hello"     // its session id is none
)

// Direction of a frame.
type Direction string

// Directions.
const (
	Up   Direction = "up"   // to the chat server
	Down Direction = "down" // to the device
)

// Drop says why something went no further. The list is closed.
type Drop string

// Reasons of drops.
const (
	DropFull       Drop = "full"        // the queue for the chat server is
	DropNoUpstream Drop = "no_upstream" // the conversation has no chat server at the time
	DropDevice     Drop = "device"      // the device is away, or too much waits for it
	DropLate       Drop = "late"        // an answer for a connection that is no more
)

// Bridge is the speech.Voice that speaks to a chat server. It is safe for
// concurrent use.
type Bridge struct {
	opt     Options
	url     string
	dialer  websocket.Dialer
	dialNet func(ctx context.Context, network, addr string) (net.Conn, error)
	svc     atomic.Pointer[Service]
	ctx     context.Context
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
	talks   sync.Map // *speech.Conversation to *talk, from Begin to End

	mu     sync.Mutex // below any talk's lock
	closed bool
	// strays are heard of and not begun, oldest first: a frame over UDP, or the
	// end, may overtake Begin.
	strays []*talk

	Connections counters.Map[Outcome]
	BadMessages counters.Map[Bad]
	Frames      counters.Map[Direction]
	Dropped     counters.Map[Drop]
	Requests    counters.Map[string] // MCP requests answered, by outcome: ok or an error code
}

// New returns a bridge to the chat server at opt.URL; it dials nothing before
// the first conversation. Errors say what is wrong with the URL.
func New(opt Options) (*Bridge, error) {
	u, err := url.Parse(opt.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--voice-upstream: %w", err)
	case u.Scheme != "ws" && u.Scheme != "wss" || u.Host == "":
		return nil, fmt.Errorf("--voice-upstream: %q must be ws://HOST/PATH or wss://HOST/PATH", opt.URL)
	case u.User != nil:
		return nil, errors.New("--voice-upstream: name and password have no place in this URL; the token goes in a header")
	case u.Fragment != "":
		return nil, fmt.Errorf("--voice-upstream: %q must have no #fragment", opt.URL)
	}
	switch mark := u.Query().Get(markName); mark {
	case markValue:
	case "":
		u.RawQuery = strings.TrimPrefix(u.RawQuery+"&"+markName+"="+markValue, "&")
	default:
		return nil, fmt.Errorf("--voice-upstream: from=%s: the chat server must know that it speaks to a gateway; leave `from` out", mark)
	}
	if opt.Token == nil {
		opt.Token = func(string, string, time.Time) string { return credential.UpstreamTestToken }
	}
	b := &Bridge{opt: opt, url: u.String(), dialNet: (&net.Dialer{Timeout: DialTimeout}).DialContext}
	b.dialer = websocket.Dialer{HandshakeTimeout: DialTimeout, Proxy: http.ProxyFromEnvironment, ReadBufferSize: 1024, WriteBufferSize: 1024,
		WriteBufferPool: &sync.Pool{}}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

// Attach gives the bridge the service whose devices it speaks for. Call it
// before the first conversation.
func (b *Bridge) Attach(svc Service) { b.svc.Store(&svc) }

// Close hangs up what goes on and waits for the bridge's goroutines. Further
// conversations are left alone.
func (b *Bridge) Close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel()
	b.tasks.Wait()
}

// start runs a task that Close waits for; false if the bridge is closed.
func (b *Bridge) start(task func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.tasks.Go(task)
	return true
}

// Begin implements speech.Voice: it starts to dial.
func (b *Bridge) Begin(c *speech.Conversation) {
	b.mu.Lock()
	t := b.strayLocked(c)
	if t != nil {
		b.strays = slices.DeleteFunc(b.strays, func(s *talk) bool { return s == t })
	} else {
		t = newTalk(b, c)
	}
	_, twice := b.talks.LoadOrStore(c, t)
	b.mu.Unlock()
	if !twice && !t.begin() {
		b.talks.Delete(c) // its end came first
	}
}

// Message implements speech.Voice.
func (b *Bridge) Message(c *speech.Conversation, kind string, msg []byte) {
	b.talk(c).message(kind, msg)
}

// Audio implements speech.Voice.
func (b *Bridge) Audio(c *speech.Conversation, f envelope.Frame) { b.talk(c).audio(f) }

// End implements speech.Voice: the connection to the chat server ends.
func (b *Bridge) End(c *speech.Conversation) {
	b.talk(c).end()
	b.talks.Delete(c)
}

// talk finds the conversation, or makes a stray of it.
func (b *Bridge) talk(c *speech.Conversation) *talk {
	if t, ok := b.talks.Load(c); ok {
		return t.(*talk)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t, ok := b.talks.Load(c); ok {
		return t.(*talk)
	}
	t := b.strayLocked(c)
	if t == nil {
		t = newTalk(b, c)
		if len(b.strays) >= maxStrays {
			b.strays = slices.Delete(b.strays, 0, 1)
		}
		b.strays = append(b.strays, t)
	}
	return t
}

func (b *Bridge) strayLocked(c *speech.Conversation) *talk {
	for _, t := range b.strays {
		if t.c == c {
			return t
		}
	}
	return nil
}
