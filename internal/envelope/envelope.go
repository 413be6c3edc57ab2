// Package envelope is the outer layer of the xiaozhi-esp32 wire: the JSON
// message every text frame holds, and the three framings of binary frames.
//
// A message is one JSON object with a string member `type`. MCP travels as
//
//	{"session_id":"...","type":"mcp","payload":{...}}
//
// in both directions (application.cc:543-650, protocol.cc:94-98). The
// session_id a device sends is the one current when it sends, which after a
// reconnect may be an older one or empty, so it is a hint and never a key.
package envelope

import (
	"errors"
	"fmt"

	"fleetd/internal/jsonspan"
)

// TypeMCP is the type of an envelope that holds an MCP payload.
const TypeMCP = "mcp"

// MaxDeviceMessage is the longest WebSocket message the firmware can send, in
// bytes (esp-ml307 web_socket.cc:205-208).
const MaxDeviceMessage = 65535

// ErrNoType is returned for a JSON object without a string member `type`,
// which the firmware would drop as well (websocket_protocol.cc:141-157).
var ErrNoType = errors.New("message has no string member \"type\"")

// Message is one parsed envelope. All its slices point into the parsed bytes.
type Message struct {
	Type      []byte // unescaped
	SessionID []byte // unescaped; nil if absent or not a string
	Payload   []byte // the raw value of `payload`; nil if absent
}

// Parse reads one envelope. Of duplicate keys the first counts, as in cJSON.
// Errors wrap those of jsonspan, or are ErrNoType.
func Parse(msg []byte) (Message, error) {
	var m Message
	typed := false
	walk := jsonspan.Object(msg)
	for walk.Next() {
		switch string(walk.Key()) {
		case "type":
			if text, ok := jsonspan.StringBytes(walk.Value()); ok && !typed {
				m.Type, typed = text, true
			}
		case "session_id":
			if text, ok := jsonspan.StringBytes(walk.Value()); ok && m.SessionID == nil {
				m.SessionID = text
			}
		case "payload":
			if m.Payload == nil {
				m.Payload = walk.Value()
			}
		}
	}
	if err := walk.Err(); err != nil {
		return Message{}, fmt.Errorf("envelope: %w", err)
	}
	if !typed {
		return Message{}, fmt.Errorf("envelope: %w", ErrNoType)
	}
	return m, nil
}

// AppendMCP appends the envelope of one MCP payload, which must be valid JSON.
// session must need no escaping: the device echoes it unescaped.
func AppendMCP(dst []byte, session string, payload []byte) []byte {
	dst = append(dst, `{"session_id":"`...)
	dst = append(dst, session...)
	dst = append(dst, `","type":"mcp","payload":`...)
	dst = append(dst, payload...)
	return append(dst, '}')
}
