package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

const (
	session   = "0f8fad5b-d9cb-469f-a165-70867728950e"
	callLimit = 10 * time.Second
	bodyLimit = 8192
)

var buffers = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, 2048)) }}

// callServer passes calls on to devices.
type callServer struct {
	upgrader websocket.Upgrader
	replies  sync.Pool // of chan []byte

	mu      sync.RWMutex
	devices map[string]*callDevice
}

// callDevice is a connected device and the calls that it has not answered.
type callDevice struct {
	conn  *websocket.Conn
	write sync.Mutex

	mu      sync.Mutex
	lastID  uint64
	pending map[uint64]chan []byte
}

func serveCalls([]string) error {
	s := &callServer{devices: make(map[string]*callDevice), replies: sync.Pool{New: func() any { return make(chan []byte, 1) }},
		upgrader: websocket.Upgrader{ReadBufferSize: 1024, WriteBufferSize: 1024, WriteBufferPool: &sync.Pool{}}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ws", s.connect)
	mux.HandleFunc("POST /v1/devices/{id}/tools/call", s.call)
	l, err := listen(nil, mux)
	if err != nil {
		return err
	}
	return answer(l.Addr().String(), nil)
}

// listen serves HTTP on a free port of loopback; wrap, if given, puts TLS on top of it.
func listen(wrap func(net.Listener) (net.Listener, error), h http.Handler) (net.Listener, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil && wrap != nil {
		l, err = wrap(l)
	}
	if err != nil {
		return nil, err
	}
	go func() { _ = http.Serve(l, h) }() // until the process ends
	return l, nil
}

func (s *callServer) connect(w http.ResponseWriter, r *http.Request) {
	c, err := s.upgrader.Upgrade(w, r, nil)
	if err != nil {
		return
	}
	d := &callDevice{conn: c, pending: make(map[uint64]chan []byte)}
	s.mu.Lock()
	s.devices[r.Header.Get("Device-Id")] = d
	s.mu.Unlock()
	go d.read()
}

// read hands answers to the calls that wait for them.
func (d *callDevice) read() {
	defer func() { _ = d.conn.Close() }()
	for {
		_, r, err := d.conn.NextReader()
		if err != nil {
			return
		}
		b := buffers.Get().(*bytes.Buffer)
		b.Reset()
		if _, err := b.ReadFrom(r); err != nil {
			return
		}
		if id, result, err := splitReply(b.Bytes()); err == nil {
			if reply := d.take(id); reply != nil {
				reply <- bytes.Clone(result)
			}
		}
		buffers.Put(b)
	}
}

// take ends the wait of a call.
func (d *callDevice) take(id uint64) chan []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	reply := d.pending[id]
	delete(d.pending, id)
	return reply
}

func (s *callServer) call(w http.ResponseWriter, r *http.Request) {
	b := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(b)
	b.Reset()
	if _, err := b.ReadFrom(http.MaxBytesReader(w, r.Body, bodyLimit)); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callLimit)
	defer cancel()
	result, err := s.exchange(ctx, r.PathValue("id"), b.Bytes())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	b.Reset()
	b.WriteString(`{"result":`)
	b.Write(result)
	b.WriteByte('}')
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	_, _ = w.Write(b.Bytes()) // the caller may be gone
}

// exchange sends a call to a device and waits for the result.
func (s *callServer) exchange(ctx context.Context, device string, params []byte) ([]byte, error) {
	s.mu.RLock()
	d := s.devices[device]
	s.mu.RUnlock()
	if d == nil {
		return nil, errors.New("the device is not connected")
	}
	if !json.Valid(params) {
		return nil, errSyntax
	}
	reply := s.replies.Get().(chan []byte)
	d.mu.Lock()
	d.lastID++
	id := d.lastID
	d.pending[id] = reply
	d.mu.Unlock()
	if err := d.send(id, params); err != nil {
		return nil, err
	}
	select {
	case result := <-reply:
		s.replies.Put(reply)
		return result, nil
	case <-ctx.Done():
		d.take(id)
		return nil, ctx.Err()
	}
}

func (d *callDevice) send(id uint64, params []byte) error {
	b := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(b)
	b.Reset()
	b.WriteString(`{"session_id":"` + session + `","type":"mcp","payload":{"jsonrpc":"2.0","method":"tools/call","params":`)
	b.Write(params)
	b.WriteString(`,"id":`)
	b.Write(strconv.AppendUint(b.AvailableBuffer(), id, 10))
	b.WriteString("}}")
	d.write.Lock()
	defer d.write.Unlock()
	return d.conn.WriteMessage(websocket.TextMessage, b.Bytes())
}
