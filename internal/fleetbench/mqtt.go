package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"

	"fleetd/internal/fleetbench/load"
)

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
	body := append(load.AppendString(nil, "MQTT"), 4, 0xc2) // level; clean session, user name and password
	body = binary.BigEndian.AppendUint16(body, l.keep)
	body = load.AppendString(body, deviceToken(i))
	body = load.AppendString(body, "client:"+clientID(i))
	body = load.AppendString(body, l.password)
	packet := binary.AppendUvarint([]byte{load.MQTTConnect}, uint64(len(body)))
	if _, err := c.Write(append(packet, body...)); err != nil {
		return err
	}
	first, answer, err := load.ReadPacket(w.br, w.buf)
	if err != nil {
		return fmt.Errorf("CONNACK: %w", err)
	}
	if first != load.MQTTConnack || len(answer) != 2 || answer[1] != 0 {
		return fmt.Errorf("refused: %x %x", first, answer)
	}
	return nil
}
