package attacks

import (
	"bytes"
	"fmt"
	"image"
	"image/jpeg"
	"net/http"
	"time"

	"fleetd/simulator/firmware"
)

// memberAttacks need the credentials of a device.
var memberAttacks = []attack{
	{"json-mqtt", "20 messages a second and device, `--flood-grace`", func(a *attacker) { a.evil("mqtt") }},
	{"json-websocket", "the same", func(a *attacker) { a.evil("websocket") }},
	{"notifications", "the same", notifications},
	{"fragments", "the same", fragments},
	{"reconnects", "the list of tools is read once per connection", reconnects},
	{"uploads", "64 uploads, 2 of a device; `--photo-limit`", uploads},
}

// evil lets devices send documents that are hard to read.
func (a *attacker) evil(transport string) {
	a.lines(10, transport, func(line *firmware.Line, round int) error { return line.Send(evilJSON[round%len(evilJSON)]) })
}

// notifications lets devices report events without end.
func notifications(a *attacker) {
	note := []byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/button_pressed","params":{"button":"a"}}}`)
	a.lines(40, "mqtt", func(line *firmware.Line, _ int) error { return line.Send(note) })
}

// fragments sends empty continuation frames and pings.
func fragments(a *attacker) {
	var logins []firmware.Login
	for range 20 {
		l, err := a.enlist("websocket")
		if err != nil {
			a.note(err.Error())
			return
		}
		logins = append(logins, l)
	}
	pings, pieces := bytes.Repeat(frame(0x89, nil), 100), append(frame(0x01, nil), bytes.Repeat(frame(0x00, nil), 100)...)
	a.workers(len(logins), func(worker, _ int) string {
		c, err := a.upgrade(logins[worker], source(9, worker))
		if err != nil {
			a.pause(50 * time.Millisecond)
			return failure(err)
		}
		defer func() { _ = c.Close() }()
		go func() {
			buffer := make([]byte, 4096)
			for {
				if _, err := c.Read(buffer); err != nil {
					return
				}
			}
		}()
		batch := pings
		if worker%2 == 0 {
			if _, err := c.Write(pieces); err != nil {
				return "closed"
			}
			batch = pieces[len(frame(0x01, nil)):]
		}
		for a.ctx.Err() == nil {
			if _, err := c.Write(batch); err != nil {
				return "closed"
			}
			a.note("hundred frames")
		}
		return "end"
	})
}

// reconnects lets devices log in and go, as fast as it goes.
func reconnects(a *attacker) {
	var logins []firmware.Login
	for range 20 {
		l, err := a.enlist("mqtt")
		if err != nil {
			a.note(err.Error())
			return
		}
		logins = append(logins, l)
	}
	a.workers(2*len(logins), func(worker, _ int) string {
		l := logins[worker%len(logins)] // two with the same credentials
		c, err := a.dial(l.Endpoint, source(9, worker))
		if err != nil {
			return "dial: " + failure(err)
		}
		line, err := l.Open(a.ctx, c)
		if err != nil {
			a.pause(10 * time.Millisecond)
			return "refused"
		}
		line.Close()
		return "in"
	})
}

// uploads lets devices send photos into a store that is full.
func uploads(a *attacker) {
	picture := photo()
	clients, tokens, ids := make([]*http.Client, 40), make([]string, 40), make([]string, 40)
	for i := range clients {
		l, err := a.enlist("mqtt")
		if err != nil {
			a.note(err.Error())
			return
		}
		clients[i], ids[i], tokens[i] = a.client(source(9, i)), l.Device, a.mint.UploadToken(l.Device, time.Now().Add(24*time.Hour))
	}
	a.workers(len(clients), func(worker, _ int) string { return a.upload(clients[worker], ids[worker], tokens[worker], picture) })
}

// upload sends a photo as the firmware does.
func (a *attacker) upload(client *http.Client, id, token string, picture []byte) string {
	const boundary = "----ESP32_CAMERA_BOUNDARY"
	body := "--" + boundary + "\r\nContent-Disposition: form-data; name=\"question\"\r\n\r\nwhat?\r\n--" + boundary +
		"\r\nContent-Disposition: form-data; name=\"file\"; filename=\"camera.jpg\"\r\nContent-Type: image/jpeg\r\n\r\n" + string(picture) + "\r\n--" + boundary + "--\r\n"
	outcome, _, _ := a.request(client, http.MethodPost, "http://"+a.device+"/xiaozhi/vision/explain", body, "Device-Id", id, "Client-Id", clientOf(id),
		"Authorization", "Bearer "+token, "Content-Type", fmt.Sprintf("multipart/form-data; boundary=%s", boundary))
	return outcome
}

// photo is a picture of 60 kB, the rest being zeros.
func photo() []byte {
	var b bytes.Buffer
	if err := jpeg.Encode(&b, image.NewGray(image.Rect(0, 0, 640, 480)), nil); err != nil {
		panic(err) // it is written into memory
	}
	return append(b.Bytes(), make([]byte, 60<<10)...)
}
