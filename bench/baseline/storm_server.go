package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/gorilla/websocket"
)

// Requests to a device.
const (
	requestStart       = `{"session_id":"` + session + `","type":"mcp","payload":{"jsonrpc":"2.0","method":"`
	requestInitialize  = requestStart + `initialize","params":{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":{"name":"baseline","version":"1"}},"id":1}}`
	notifyInitialized  = requestStart + `notifications/initialized"}}`
	requestToolsBefore = requestStart + `tools/list","params":{"cursor":"`
)

// pageLimit is how many pages a list may have.
const pageLimit = 20

// toolList is a list as it is stored.
type toolList struct {
	hash  [sha256.Size]byte
	json  []byte // the array of all tools
	tools []struct {
		Name, Description string
		InputSchema       json.RawMessage
	}
}

// stormServer discovers the tools of devices and stores them.
type stormServer struct {
	upgrader websocket.Upgrader
	put      func(device string, l *toolList) error
	ready    atomic.Int64
	lists    sync.Map               // by hash
	fault    atomic.Pointer[string] // of the first device that failed
}

// serveStorm takes the arguments store and database.
func serveStorm(arguments []string) error {
	if len(arguments) != 2 {
		return errors.New("give a store and a database")
	}
	put, err := openStore(arguments[0], arguments[1])
	if err != nil {
		return err
	}
	s := &stormServer{put: put, upgrader: websocket.Upgrader{ReadBufferSize: 512, WriteBufferSize: 1024, WriteBufferPool: &sync.Pool{}}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ws", func(w http.ResponseWriter, r *http.Request) {
		if c, err := s.upgrader.Upgrade(w, r, nil); err == nil {
			go s.device(c, r.Header.Get("Device-Id"))
		}
	})
	l, err := listen(nil, mux)
	if err != nil {
		return err
	}
	return answer(l.Addr().String(), func(string) any {
		p := progress{Ready: int(s.ready.Load())}
		if fault := s.fault.Load(); fault != nil {
			p.Error = *fault
		}
		return p
	})
}

// device stores a device's tools, then waits for its end.
func (s *stormServer) device(c *websocket.Conn, id string) {
	defer func() { _ = c.Close() }()
	l, err := s.discover(c)
	if err == nil {
		err = s.put(id, l)
	}
	if err != nil {
		fault := fmt.Sprintf("device %s: %v", id, err)
		s.fault.CompareAndSwap(nil, &fault)
		return
	}
	s.ready.Add(1)
	for err == nil {
		_, _, err = c.NextReader()
	}
}

func (s *stormServer) discover(c *websocket.Conn) (*toolList, error) {
	send := func(m string) error { return c.WriteMessage(websocket.TextMessage, []byte(m)) }
	if err := errors.Join(receive(c, typed("hello")), send(string(helloReply)), send(requestInitialize)); err != nil {
		return nil, err
	}
	if err := errors.Join(receive(c, typed("mcp")), send(notifyInitialized)); err != nil {
		return nil, err
	}
	var pages [][]byte
	digest, cursor := sha256.New(), ""
	for id := 2; id < 2+pageLimit; id++ {
		if err := send(requestToolsBefore + cursor + `"},"id":` + strconv.Itoa(id) + "}}"); err != nil {
			return nil, err
		}
		if err := receive(c, func(m []byte) error {
			tools, next, err := splitPage(m)
			cursor = string(next)
			pages = append(pages, bytes.Clone(tools))
			digest.Write(tools)
			return err
		}); err != nil {
			return nil, err
		}
		if cursor == "" {
			return s.list([sha256.Size]byte(digest.Sum(nil)), pages)
		}
	}
	return nil, fmt.Errorf("the list has more than %d pages", pageLimit)
}

// list is the one list with this hash; the first device with it has its pages decoded.
func (s *stormServer) list(hash [sha256.Size]byte, pages [][]byte) (*toolList, error) {
	if known, ok := s.lists.Load(hash); ok {
		return known.(*toolList), nil
	}
	l := &toolList{hash: hash, json: append(append([]byte{'['}, bytes.Join(pages, []byte{','})...), ']')}
	if err := json.Unmarshal(l.json, &l.tools); err != nil {
		return nil, err
	}
	known, _ := s.lists.LoadOrStore(hash, l)
	return known.(*toolList), nil
}

// receive reads one message, which f must not keep.
func receive(c *websocket.Conn, f func(message []byte) error) error {
	_, r, err := c.NextReader()
	if err != nil {
		return err
	}
	b := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(b)
	b.Reset()
	if _, err := b.ReadFrom(r); err != nil {
		return err
	}
	return f(b.Bytes())
}

// typed accepts messages of one type.
func typed(want string) func([]byte) error {
	return func(message []byte) error {
		var m struct {
			Type    string
			Payload struct {
				ID     int
				Result json.RawMessage
			}
		}
		if err := json.Unmarshal(message, &m); err != nil || m.Type != want {
			return errSyntax
		}
		return nil
	}
}

// splitPage takes the tools and the cursor out of a page. It relies on the order in which the firmware writes.
func splitPage(message []byte) (tools, cursor []byte, err error) {
	_, page, found := bytes.Cut(message, []byte(`"result":{"tools":[`))
	if !found {
		return nil, nil, errSyntax
	}
	page = bytes.TrimSuffix(page, []byte("}}}"))
	before := []byte(`],"nextCursor":"`)
	if at := bytes.LastIndex(page, before); at >= 0 {
		return page[:at], bytes.TrimSuffix(page[at+len(before):], []byte{'"'}), nil
	}
	return bytes.TrimSuffix(page, []byte{']'}), nil, nil
}
