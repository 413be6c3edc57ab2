package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/bench/load"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/envelope"
)

var argumentsCalled = []byte(`{"volume":50}`)

const (
	firmwares  = 20 // distinct tool lists
	listLength = 12
)

// toolLists are the results of `tools/list`, one page for each firmware.
var toolLists = sync.OnceValue(func() (lists [firmwares]string) {
	for f := range lists {
		tools := []string{`{"name":"` + load.ToolSetVolume + `","description":"Set the volume of the audio speaker.","inputSchema":` +
			`{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":100}},"required":["volume"]}}`}
		for i := 1; i < listLength; i++ {
			tools = append(tools, fmt.Sprintf(`{"name":"self.module_%02d.set_property","description":"Firmware 2.%d: set the property of module %d.",`+
				`"inputSchema":{"type":"object","properties":{"value":{"type":"integer"}},"required":["value"]}}`, i, f, i))
		}
		lists[f] = `{"tools":[` + strings.Join(tools, ",") + `]}`
	}
	return lists
})

// device is one simulated device. It has no goroutine: the responder of its node answers for it.
type device struct {
	id   devices.ID
	home int   // index of its node
	conn *conn // its newest connection
}

func newDevice(i, home int) device {
	return device{id: devices.ID(fmt.Sprintf("02:00:%02x:%02x:%02x:%02x", i>>24&0xff, i>>16&0xff, i>>8&0xff, i&0xff)), home: home}
}

// conn is one connection of a device, the session.Conn of its session.
type conn struct {
	to       *responder
	session  atomic.Pointer[session.Session]
	begun    int64 // Unix nanoseconds
	firmware uint8
	closed   atomic.Bool
}

var errClosed = errors.New("the connection is closed")

// SendControl gives a request to the responder, and ignores notifications, as the firmware does.
func (c *conn) SendControl(msg []byte) error {
	if c.closed.Load() {
		return errClosed
	}
	id, err := strconv.ParseInt(string(load.RequestID(msg)), 10, 64)
	if err != nil {
		return nil
	}
	r := request{conn: c, id: id}
	switch {
	case bytes.Contains(msg, []byte(`"method":"tools/call"`)):
		r.kind = kindCall
	case bytes.Contains(msg, []byte(`"method":"tools/list"`)):
		r.kind = kindList
	}
	select {
	case c.to.inbox <- r:
		return nil
	case <-c.to.ctx.Done():
		return errClosed
	}
}

// Close ends the connection.
func (c *conn) Close(devices.CloseReason) { c.closed.Store(true) }

type requestKind uint8

const (
	kindInitialize requestKind = iota
	kindList
	kindCall
)

type request struct {
	conn *conn
	id   int64
	kind requestKind
}

// responder answers for all devices of one node on one goroutine, so that a session gets its messages one at a time.
type responder struct {
	ctx   context.Context
	inbox chan request

	mu     sync.Mutex
	listed []time.Duration // from the begin of a connection to the answer with its tools
}

func newResponder(ctx context.Context) *responder {
	return &responder{ctx: ctx, inbox: make(chan request, 4096)}
}

func (r *responder) run() {
	var buf []byte
	for {
		select {
		case <-r.ctx.Done():
			return
		case q := <-r.inbox:
			buf = r.answer(q, buf[:0])
		}
	}
}

func (r *responder) answer(q request, buf []byte) []byte {
	session := q.conn.session.Load()
	for session == nil { // another node calls it before Accept has returned
		if q.conn.closed.Load() || r.ctx.Err() != nil {
			return buf
		}
		time.Sleep(100 * time.Microsecond)
		session = q.conn.session.Load()
	}
	payload := strconv.AppendInt([]byte(`{"jsonrpc":"2.0","id":`), q.id, 10)
	payload = append(payload, `,"result":`...)
	switch q.kind {
	case kindInitialize:
		payload = fmt.Appendf(payload, `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"2.%d.0"}}`, q.conn.firmware)
	case kindList:
		payload = append(payload, toolLists()[q.conn.firmware]...)
	case kindCall:
		payload = append(payload, `{"content":[{"type":"text","text":"true"}],"isError":false}`...)
	}
	buf = envelope.AppendMCP(buf, session.ID(), append(payload, '}'))
	_ = session.HandleControl(buf) // fails if the session has ended meanwhile
	if q.kind == kindList {
		r.mu.Lock()
		r.listed = append(r.listed, time.Duration(time.Now().UnixNano()-q.conn.begun))
		r.mu.Unlock()
	}
	return buf
}

// take returns the times since the last take.
func (r *responder) take() []time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	listed := r.listed
	r.listed = nil
	return listed
}
