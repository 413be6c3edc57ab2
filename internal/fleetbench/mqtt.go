package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

// First bytes of the MQTT 3.1.1 packets that devices of this program send and take (sections 2.2 and 3).
const (
	mqttConnect = 0x10
	mqttConnack = 0x20
	mqttPublish = 0x30
)

// framing is how messages travel on a connection: in WebSocket frames, or, with a topic, in PUBLISH packets for it.
type framing struct{ topic string }

func (f framing) append(dst, message []byte) []byte {
	if f.topic == "" {
		return appendFrame(dst, opText, message)
	}
	dst = append(dst, mqttPublish)
	dst = binary.AppendUvarint(dst, uint64(2+len(f.topic)+len(message))) // remaining lengths are varints (section 2.2.3)
	return append(appendString(dst, f.topic), message...)
}

// read reads what comes next. A PUBLISH is reported as the WebSocket text that it would be, other packets as 0.
func (f framing) read(br *bufio.Reader, buf []byte) (op byte, message []byte, err error) {
	if f.topic == "" {
		return readFrame(br, buf)
	}
	first, body, err := readPacket(br, buf)
	if err != nil || first&0xf0 != mqttPublish {
		return 0, nil, err
	}
	if len(body) < 2 || len(body) < 2+int(binary.BigEndian.Uint16(body)) {
		return 0, nil, errors.New("PUBLISH without its topic")
	}
	return opText, body[2+binary.BigEndian.Uint16(body):], nil
}

// appendString appends an MQTT string.
func appendString(dst []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(dst, uint16(len(s))), s...)
}

// readPacket reads one MQTT packet into buf, or a larger buffer if it does not fit.
func readPacket(br *bufio.Reader, buf []byte) (first byte, body []byte, err error) {
	if first, err = br.ReadByte(); err != nil {
		return 0, nil, err
	}
	n, err := binary.ReadUvarint(br)
	if err != nil {
		return 0, nil, err
	}
	if n > 64<<10 {
		return 0, nil, errors.New("MQTT packet over 64 KiB")
	}
	if uint64(cap(buf)) < n {
		buf = make([]byte, n)
	}
	_, err = io.ReadFull(br, buf[:n])
	return first, buf[:n], err
}

// login is what the OTA reply told a device about its transport.
type login struct {
	address  string // of the MQTT listener
	password string // or the WebSocket's token
	topic    string // to publish to
	keep     uint16 // seconds
}

func (l *login) read(transport string, reply []byte) error {
	var r struct {
		WebSocket struct{ Token string }
		MQTT      struct {
			Endpoint, Password string
			PublishTopic       string `json:"publish_topic"`
			Keepalive          uint16
		}
	}
	if err := json.Unmarshal(reply, &r); err != nil {
		return fmt.Errorf("OTA reply: %w", err)
	}
	*l = login{password: r.WebSocket.Token}
	if transport == overMQTT {
		*l = login{address: r.MQTT.Endpoint, password: r.MQTT.Password, topic: r.MQTT.PublishTopic, keep: r.MQTT.Keepalive}
	}
	if l.password == "" || transport == overMQTT && (l.topic == "" || l.address == "") {
		return fmt.Errorf("OTA reply: no login over %s in %.300q", transport, reply)
	}
	return nil
}

// connectMQTT logs device i in.
func (w *dancer) connectMQTT(c net.Conn, l login, i int) error {
	body := append(appendString(nil, "MQTT"), 4, 0xc2) // level; clean session, user name and password
	body = binary.BigEndian.AppendUint16(body, l.keep)
	body = appendString(body, deviceToken(i))
	body = appendString(body, "client:"+clientID(i))
	body = appendString(body, l.password)
	packet := binary.AppendUvarint([]byte{mqttConnect}, uint64(len(body)))
	if _, err := c.Write(append(packet, body...)); err != nil {
		return err
	}
	first, answer, err := readPacket(w.br, w.buf)
	if err != nil {
		return fmt.Errorf("CONNACK: %w", err)
	}
	if first != mqttConnack || len(answer) != 2 || answer[1] != 0 {
		return fmt.Errorf("refused: %x %x", first, answer)
	}
	return nil
}
