package wsdevice

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/lobby"
)

var errFlooded = errors.New("the device was closed for sending too much, and is back too soon; try again later")

// emptyLimit is how many bytes may come in a row with nothing in them for the session:
// empty fragments of a message. The firmware sends none.
const emptyLimit = 4 << 10

// watcher hands the upgrade a connection that is watched.
type watcher struct {
	http.ResponseWriter
	conn *conn
}

// Hijack implements http.Hijacker.
func (w watcher) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	return &watched{c, w.conn}, buffered, nil
}

// watched is the connection below the WebSocket, whose reader meets fragments without
// content alone and tells nobody.
type watched struct {
	net.Conn
	conn *conn
}

// NetConn is the connection below, for lobby.Vouch.
func (w *watched) NetConn() net.Conn { return w.Conn }

// Read implements net.Conn.
func (w *watched) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if w.conn.empty += n; err == nil && w.conn.empty > emptyLimit {
		w.conn.empty = 0
		err = w.conn.note(lobby.CostMessage)
	}
	return n, err
}

// note counts what was not asked for, and waits while the device sends too much. An
// error ends the connection.
func (c *conn) note(cost float32) error {
	pause, err := c.meter.Note(c.front.opt.Floods, cost, time.Now())
	if pause > 0 {
		time.Sleep(pause) // the device's own bytes wait, in its own buffers
	}
	return err
}

// flooded keeps the device away for a while.
func (c *conn) flooded() {
	session := c.session.Load()
	c.front.opt.Floods.Bar(string(session.Device()), time.Now())
	session.Close(devices.CloseFlooding)
}

// ping answers a ping of the device.
func (c *conn) ping(data string) error {
	c.empty = 0
	if err := c.note(lobby.CostControl); err != nil {
		return err
	}
	_ = c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Now().Add(WriteTimeout)) // an error shows at the next read
	return nil
}
