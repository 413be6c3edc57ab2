package firmware

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// documents lends JSON parsers, so that a quiet device owns none.
var documents = sync.Pool{New: func() any { return new(jsonDoc) }}

// onText is the text half of WebsocketProtocol's data callback and Application's OnIncomingJson. The caller pumps the
// main loop afterwards. session_id is checked in the goodbye of MQTT only. False means that it is no JSON with a type.
func (d *Device) onText(doc *jsonDoc, data []byte) bool {
	root, err := doc.parse(data)
	kind := root.get("type")
	if err != nil || !kind.is(jsonString) {
		d.countMessage("(invalid)")
		return false
	}
	d.mu.Lock()
	udp := d.mqtt != nil
	d.mu.Unlock()
	switch name := string(kind.bytes()); name {
	case "hello":
		if udp {
			d.onUDPHello(root)
		} else {
			d.onServerHello(root)
		}
	case "goodbye":
		if udp {
			d.onGoodbye(root)
		} else {
			d.countMessage(name)
		}
	case "mcp":
		if payload := root.get("payload"); payload.is(jsonObject) {
			d.onMCP(payload)
		}
	case "tts":
		d.countMessage(name)
		d.onTTS(root.get("state"))
	case "system":
		d.countMessage(name)
		if string(root.get("command").bytes()) == "reboot" {
			d.post(job{kind: jobDo, do: d.restartSoon})
		}
	default:
		d.countMessage(name)
	}
	return true
}

// restartSoon is Application::Reboot: the channel goes first, the chip a second later.
func (d *Device) restartSoon() {
	d.closeChannel()
	if d.sleep(time.Second) {
		d.reboot()
	}
}

// onServerHello is ParseServerHello (websocket_protocol.cc:224-250).
func (d *Device) onServerHello(root value) {
	transport := root.get("transport")
	if !transport.is(jsonString) {
		d.fail(fmt.Errorf("%w: server hello without a string transport is a null dereference", errCrash))
		return
	}
	if string(transport.bytes()) != "websocket" {
		d.countMessage("hello (other transport)")
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if id := root.get("session_id"); id.is(jsonString) {
		d.sessionID = id.string()
	}
	d.takeAudioParamsLocked(root.get("audio_params"))
	seen := d.helloWait == nil
	d.acceptHelloLocked()
	d.helloSeen = d.helloSeen || seen
}

// acceptHelloLocked notes the session of an accepted server hello and ends the wait for it.
func (d *Device) acceptHelloLocked() {
	d.stats.serverHellos++
	if n := len(d.stats.sessions); n == keepSessions {
		d.stats.sessions = slices.Delete(d.stats.sessions, 0, 1)
	}
	d.stats.sessions = append(d.stats.sessions, d.sessionID)
	if d.helloWait != nil {
		close(d.helloWait)
		d.helloWait = nil
	}
}

// countMessage counts a message from the server by type.
func (d *Device) countMessage(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.stats.messages {
		if d.stats.messages[i].name == name {
			d.stats.messages[i].n++
			return
		}
	}
	// A hostile server must not be able to grow this list.
	if len(d.stats.messages) >= 32 {
		name = "(other)"
		if i := slices.IndexFunc(d.stats.messages, func(m messageCount) bool { return m.name == name }); i >= 0 {
			d.stats.messages[i].n++
			return
		}
	}
	d.stats.messages = append(d.stats.messages, messageCount{name: name, n: 1})
}

// sendText sends one JSON message, if a socket is open.
func (d *Device) sendText(s string) {
	d.mu.Lock()
	out := d.out
	d.mu.Unlock()
	if out == nil {
		return
	}
	room := getBuffer()
	*room = append(appendFrameRoom(*room), s...)
	d.write(out, opText, room)
}

// write sends and returns the buffer. A failed send is Protocol::SetError: the device goes idle and will open a new
// socket for the next conversation.
func (d *Device) write(out link, opcode byte, room *[]byte) {
	err := out.write(opcode, room)
	putBuffer(room)
	if err == nil {
		return
	}
	d.mu.Lock()
	d.errored = true
	d.stats.sendErrors++
	d.app = appIdle
	d.hushLocked()
	udp := d.mqtt != nil
	d.mu.Unlock()
	if udp || err == errTooLong {
		d.note("send: " + err.Error())
	}
}
