package devicetest

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Request is one MCP request or notification as the device receives it.
type Request struct {
	SessionID string
	ID        json.RawMessage // nil for a notification
	Method    string
	Params    json.RawMessage
}

// ParseRequest reads an envelope that the server sent; ok is false if it is no
// MCP message.
func ParseRequest(envelope []byte) (r Request, ok bool) {
	var e struct {
		SessionID string `json:"session_id"`
		Type      string
		Payload   struct {
			ID     json.RawMessage
			Method string
			Params json.RawMessage
		}
	}
	if json.Unmarshal(envelope, &e) != nil || e.Type != "mcp" {
		return Request{}, false
	}
	return Request{e.SessionID, e.Payload.ID, e.Payload.Method, e.Payload.Params}, true
}

// Script answers like a device: it lists Tools, on one page unless Pages is set; Call answers
// tools/call with the rest of the payload after the id, e.g. `"result":{...}`, or nothing for silence.
type Script struct {
	Tools    string // JSON array
	Firmware string
	Call     func(tool string, arguments json.RawMessage) (rest string)
	Other    func(r Request) (rest string) // any other request; nil answers like the firmware

	mu       sync.Mutex
	received []Request
	messages []string
}

// note keeps a message other than MCP and hello.
func (s *Script) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.messages = append(s.messages, text)
}

// Messages returns what the device received besides MCP and hello.
func (s *Script) Messages() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.messages)
}

// Volume is the tool most tests call.
const Volume = `{"name":"self.audio_speaker.set_volume","description":"Speaker volume.","inputSchema":{"type":"object","properties":{"volume":{"type":"integer","minimum":0,"maximum":100}},"required":["volume"]}}`

// Reboot is a user-only tool.
const Reboot = `{"name":"self.reboot","description":"Restart.","inputSchema":{"type":"object","properties":{}},"annotations":{"audience":["user"]}}`

// True is the firmware's answer to a call that worked.
const True = `"result":{"content":[{"type":"text","text":"true"}],"isError":false}`

// Received returns the methods of all requests so far.
func (s *Script) Received() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.received...)
}

// Answer returns the envelope to send back for one received, empty for none.
func (s *Script) Answer(envelope []byte) string {
	r, ok := ParseRequest(envelope)
	if !ok {
		return ""
	}
	s.mu.Lock()
	s.received = append(s.received, r)
	s.mu.Unlock()
	if r.ID == nil {
		return ""
	}
	rest := s.rest(r)
	if rest == "" {
		return ""
	}
	return fmt.Sprintf(`{"session_id":"%s","type":"mcp","payload":{"jsonrpc":"2.0","id":%s,%s}}`, r.SessionID, r.ID, rest)
}

func (s *Script) rest(r Request) string {
	if s.Other != nil {
		if rest := s.Other(r); rest != "" {
			return strings.TrimPrefix(rest, "silent")
		}
	}
	switch r.Method {
	case "initialize":
		return `"result":{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"bread-compact-wifi","version":"` + s.Firmware + `"}}`
	case "tools/list":
		return `"result":{"tools":` + s.Tools + `}`
	case "tools/call":
		var p struct {
			Name      string
			Arguments json.RawMessage
		}
		if json.Unmarshal(r.Params, &p) == nil && s.Call != nil {
			return s.Call(p.Name, p.Arguments)
		}
		return True
	}
	return `"error":{"message":"Method not implemented: ` + r.Method + `"}`
}

// NewScript is a device with two tools that answers every call with true.
func NewScript() *Script {
	return &Script{Tools: "[" + Volume + "," + Reboot + "]", Firmware: "2.4.2"}
}

// Play answers by the script until the connection ends: messages other than MCP
// are noted, hellos open audio.
func (s *Script) Play(d Device) {
	for {
		text, err := d.Receive()
		if err != nil {
			return
		}
		switch {
		case strings.Contains(text, `"type":"hello"`):
			if d.HandleHello(text) != nil {
				return
			}
		case !strings.Contains(text, `"type":"mcp"`):
			s.note(text)
		default:
			if answer := s.Answer([]byte(text)); answer != "" && d.Send(answer) != nil {
				return
			}
		}
	}
}

// ForgetMessages forgets the messages that the device has received.
func (s *Script) ForgetMessages() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.messages = nil
}
