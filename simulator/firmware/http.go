package firmware

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	// maxHTTPBody is MAX_BODY_CHUNKS_SIZE: with that many bytes waiting, the firmware's HTTP client blocks forever
	// (esp-ml307 src/http_client.cc:258-276).
	maxHTTPBody = 8192
	httpTimeout = 30 * time.Second
)

var (
	// errHang stands for the dead-lock of the firmware's HTTP client.
	errHang = errors.New("answer of 8192 bytes or more: the HTTP client of the device never returns")
	// errOpen means that the request could not be sent at all.
	errOpen = errors.New("cannot open the HTTP connection")
)

type header struct{ name, value string }

var httpReaders = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4096) }}

// httpCall is one request of the firmware's HTTP client: own header order, one connection per request.
type httpCall struct {
	tcp    net.Conn
	stop   func() bool
	reader *bufio.Reader
	answer *http.Response
}

// openHTTP connects and sends the request head; headers are given in wire order and body, if not nil, is sent with a
// Content-Length. Without a body a POST is chunked and continues with chunk.
func openHTTP(ctx context.Context, d *dialer, index int, method, url string, headers []header, body []byte) (*httpCall, error) {
	u, err := parseHTTPURL(url)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errOpen, err)
	}
	tcp, err := d.dial(ctx, index, u)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errOpen, err)
	}
	c := &httpCall{tcp: tcp}
	c.stop = context.AfterFunc(ctx, func() { _ = tcp.Close() })
	if err := c.tcp.SetDeadline(time.Now().Add(httpTimeout)); err != nil {
		return nil, errors.Join(err, c.close())
	}
	if _, err := c.tcp.Write(httpRequest(method, u, headers, body)); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", errOpen, err), c.close())
	}
	return c, nil
}

// httpRequest is HttpClient::BuildHttpRequest: Host, the caller's headers, length, Connection.
func httpRequest(method string, u deviceURL, headers []header, body []byte) []byte {
	b := make([]byte, 0, 512+len(body))
	b = append(b, method+" "+u.path+" HTTP/1.1\r\nHost: "+u.host...)
	if (u.scheme == "http" && u.port != 80) || (u.scheme == "https" && u.port != 443) {
		b = strconv.AppendInt(append(b, ':'), int64(u.port), 10)
	}
	b = append(b, "\r\n"...)
	chunked := false
	for _, h := range headers {
		b = append(b, h.name+": "+h.value+"\r\n"...)
		chunked = chunked || h.name == "Transfer-Encoding"
	}
	switch {
	case len(body) > 0:
		b = append(b, "Content-Length: "+strconv.Itoa(len(body))+"\r\n"...)
	case method == "POST" && !chunked:
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	b = append(b, "Connection: close\r\n\r\n"...)
	return append(b, body...)
}

// chunk sends one chunk; an empty one ends the body.
func (c *httpCall) chunk(data []byte) error {
	if len(data) == 0 {
		_, err := io.WriteString(c.tcp, "0\r\n\r\n")
		return err
	}
	room := getBuffer()
	defer putBuffer(room)
	b := strconv.AppendInt((*room)[:0], int64(len(data)), 16)
	b = append(append(append(b, "\r\n"...), data...), "\r\n"...)
	*room = b
	_, err := c.tcp.Write(b)
	return err
}

// status waits up to 30 s for the answer's head.
func (c *httpCall) status() (int, error) {
	if err := c.tcp.SetDeadline(time.Now().Add(httpTimeout)); err != nil {
		return 0, err
	}
	c.reader = httpReaders.Get().(*bufio.Reader)
	c.reader.Reset(recv{c.tcp})
	answer, err := http.ReadResponse(c.reader, &http.Request{Method: "POST"})
	if err != nil {
		return 0, err
	}
	c.answer = answer
	return answer.StatusCode, nil
}

// body reads the whole answer within another 30 s; errHang if it is too large for the device.
func (c *httpCall) body() ([]byte, error) {
	if err := c.tcp.SetDeadline(time.Now().Add(httpTimeout)); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(c.answer.Body, maxHTTPBody))
	if len(data) >= maxHTTPBody {
		return nil, errHang
	}
	return data, err
}

// recv reads as esp-ml307 does: at most 1,500 bytes at a time (src/esp/esp_tcp.cc:133).
type recv struct{ io.Reader }

func (r recv) Read(p []byte) (int, error) { return r.Reader.Read(p[:min(len(p), 1500)]) }

// pieces gives a body to take as it arrives, within 30 s for each piece and any time in all. An error of take ends it.
func (c *httpCall) pieces(take func(piece []byte) error) error {
	room := getBuffer()
	defer putBuffer(room)
	*room = slices.Grow((*room)[:0], 4096)[:4096]
	// What came with the end of the header is the first piece.
	first := c.reader.Buffered()
	for left := c.answer.ContentLength; left > 0; {
		piece := *room
		if first > 0 {
			piece = piece[:min(first, len(piece))]
			first = 0
		}
		if err := c.tcp.SetDeadline(time.Now().Add(httpTimeout)); err != nil {
			return err
		}
		n, err := c.answer.Body.Read(piece)
		left -= int64(n)
		if n > 0 {
			if err := take(piece[:n]); err != nil {
				return err
			}
		}
		if err != nil && left > 0 {
			return err
		}
	}
	return nil
}

func (c *httpCall) close() error {
	c.stop()
	if c.reader != nil {
		c.reader.Reset(nil)
		httpReaders.Put(c.reader)
		c.reader = nil
	}
	return c.tcp.Close()
}
