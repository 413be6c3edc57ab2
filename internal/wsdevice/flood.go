package wsdevice

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
)

var errBlocked = errors.New("the device was closed for flooding and reconnected too early; try again later")

// emptyLimit is how many bytes without content for the session, such as empty fragments of
// a message, may arrive in sequence. The firmware sends none.
const emptyLimit = 4 << 10

// watchingWriter makes the upgrade use a watched connection.
type watchingWriter struct {
	http.ResponseWriter
	conn *conn
}

// Hijack implements http.Hijacker.
func (w watchingWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	return &watchedConn{c, w.conn}, buffered, nil
}

// watchedConn is the connection below the WebSocket. The WebSocket reader reads fragments
// without content internally and does not report them, so they are counted here.
type watchedConn struct {
	net.Conn
	conn *conn
}

// NetConn returns the wrapped connection, for connlimit.MarkAuthenticated.
func (w *watchedConn) NetConn() net.Conn { return w.Conn }

// Read implements net.Conn.
func (w *watchedConn) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if w.conn.emptyBytes += n; err == nil && w.conn.emptyBytes > emptyLimit {
		w.conn.emptyBytes = 0
		err = w.conn.meterFrame(connlimit.CostMessage)
	}
	return n, err
}

// meterFrame counts a frame without a request of fleetd, and pauses while the device exceeds
// its rate. An error ends the connection.
func (c *conn) meterFrame(cost float32) error {
	pause, err := c.meter.Count(c.front.opt.Floods, cost, time.Now())
	if pause > 0 {
		time.Sleep(pause) // the device's frames wait in its own buffers
	}
	return err
}

// onFlood blocks the device for a while.
func (c *conn) onFlood() {
	session := c.session.Load()
	c.front.opt.Floods.Block(string(session.Device()), time.Now())
	session.Close(devices.CloseFlooding)
}

// ping answers a ping of the device.
func (c *conn) ping(data string) error {
	c.emptyBytes = 0
	if err := c.meterFrame(connlimit.CostControl); err != nil {
		return err
	}
	_ = c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Now().Add(WriteTimeout)) // an error shows in the next read
	return nil
}
