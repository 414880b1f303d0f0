//! A client that shows everything: one connection for one request, by hand.
#![allow(dead_code)]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The message of an error, which must be of OpenAI's shape.
    pub fn error(&self) -> String {
        let error = &self.json()["error"];
        for key in ["message", "type", "param", "code"] {
            assert!(error.get(key).is_some(), "{key} is missing in {error}");
        }
        let message = error["message"].as_str().unwrap().to_owned();
        assert!(!message.contains('\n') && !message.is_empty(), "{message:?}");
        message
    }

    /// The events of a stream, without comments.
    pub fn events(&self) -> Vec<Value> {
        events(std::str::from_utf8(&self.body).unwrap())
    }
}

/// The JSON events of a stream's text, which must end with `[DONE]`.
pub fn events(text: &str) -> Vec<Value> {
    let mut data: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{text}");
    data.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The text that the events of a chat or of a completion add up to.
pub fn text_of(events: &[Value]) -> String {
    let choices = events.iter().flat_map(|e| e["choices"].as_array().unwrap());
    choices.filter_map(|c| c["text"].as_str().or(c["delta"]["content"].as_str())).collect()
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream
}

/// Sends a request and leaves the connection open.
pub fn send(address: SocketAddr, path: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = connect(address);
    let method = if body.is_empty() { "GET" } else { "POST" };
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{kind}{headers}Content-Length: {length}\r\n\r\n"
    );
    // A server that refuses early may have closed already.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    stream
}

/// Reads the answer on a connection to its end.
pub fn receive(mut stream: TcpStream) -> io::Result<Answer> {
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    let end = all.windows(4).position(|w| w == b"\r\n\r\n");
    let end = end.ok_or_else(|| io::Error::other(format!("no head: {all:?}")))?;
    let head = String::from_utf8_lossy(&all[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let is_chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let body = &all[end + 4..];
    let body = if is_chunked { dechunk(body)? } else { body.to_vec() };
    Ok(Answer { status: status.parse().unwrap_or(0), headers, body })
}

fn dechunk(mut body: &[u8]) -> io::Result<Vec<u8>> {
    let cut = || io::Error::new(io::ErrorKind::UnexpectedEof, "the body was cut");
    let mut all = Vec::new();
    loop {
        let end = body.windows(2).position(|w| w == b"\r\n").ok_or_else(cut)?;
        let size = std::str::from_utf8(&body[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        body = &body[end + 2..];
        if size == 0 {
            return Ok(all);
        }
        all.extend_from_slice(body.get(..size).ok_or_else(cut)?);
        body = body.get(size + 2..).ok_or_else(cut)?;
    }
}

pub fn get(address: SocketAddr, path: &str) -> Answer {
    receive(send(address, path, "", "")).unwrap()
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    receive(send(address, path, "", &body.to_string())).unwrap()
}

/// Looks until something is so, for ten seconds at most.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("waited in vain: {what}");
}
