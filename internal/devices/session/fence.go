//go:build !brokenfence

package session

// fenced says that a node gives way to claims. Built with the tag brokenfence
// it does not, and the chaos test must notice.
const fenced = true
