package wsdevice

import (
	"bytes"
	"crypto/tls"
	"net"
	"reflect"
	"unsafe"
)

// crypto/tls reads a whole record into a buffer that it keeps as long as the connection:
// 8 KB and more after a page of tools, for every idle device. It has no method that frees
// the buffer, so its fields are accessed by offset. If the fields differ from those of Go
// 1.26, nothing is done, and a test fails.
var tlsRaw, tlsInput = fieldOffset[bytes.Buffer]("rawInput"), fieldOffset[bytes.Reader]("input")

// keepInput is how many bytes of buffer an idle TLS connection may keep: a record header
// and what is read with it.
const keepInput = 1 << 10

// fieldOffset returns the offset of a field of tls.Conn, or 0, which is not the offset of
// either field, if there is no field of that name and type.
func fieldOffset[T any](name string) uintptr {
	f, ok := reflect.TypeFor[tls.Conn]().FieldByName(name)
	if !ok || f.Type != reflect.TypeFor[T]() {
		return 0
	}
	return f.Offset
}

// releaseInput frees the input buffers of a TLS connection if all of their bytes have been
// read. Only the goroutine that reads the connection may call it, between reads.
func releaseInput(conn net.Conn) {
	if w, ok := conn.(*watchedConn); ok {
		conn = w.Conn
	}
	c, secure := conn.(*tls.Conn)
	if !secure || tlsRaw == 0 || tlsInput == 0 {
		return
	}
	raw := (*bytes.Buffer)(unsafe.Add(unsafe.Pointer(c), tlsRaw))
	input := (*bytes.Reader)(unsafe.Add(unsafe.Pointer(c), tlsInput))
	if raw.Len() == 0 && input.Len() == 0 && raw.Cap() > keepInput {
		*raw, *input = bytes.Buffer{}, bytes.Reader{} // input points into the buffer of raw
	}
}
